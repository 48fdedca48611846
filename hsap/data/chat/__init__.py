"""Chats: from rows of any usual shape to tokens, and which of them the model has to write.

rows             what kind of chat a row is, by its fields
tree             messages with replies as conversations
conversation     turns in one form and in order (`hsap.data.document` has the nouns)
render           a Jinja template in its sandbox (bounds: an end to what it does there)
marks, spans     whose words each character of the rendered text is; what of it is trained
template         a conversation in tokens (encoded)
markers          what of a template the tokenizer reads as words
shared_question  a question with several answers as one sample
"""
