"""Data: from files as teams have them to the micro-batches of a training step.

sources      files of many formats, mixed by weights, as documents (fields: what a row is; document: the nouns;
             json_decoder: JSON of rows)
chat         chats as turns, and by a template as tokens of which some are trained
tokenise     documents as samples of token ids (tokenizer: text to ids and back), rejected: one is left out, and why
store        all of a data set's samples; prepared: the same on the disk, made once (column: what stays there)
packing      which documents share a pack, from their lengths alone
batch        the tokens, labels and positions of packs
loader       steps for one data-parallel rank, prepared ahead (prefetch)
config       the settings, `data.` of a run; opening, read: a data set as they say
"""
