"""Prepared data: documents tokenised once into a folder, which training maps into memory and never loads.

`prepare` writes such a folder, `open_store` reads one, `cached` gives the one of raw data. It is plain data, nothing in
it is unpickled:

    prepared.json       the index, written last: a folder without it isn't finished
    00000.tokens …      columns of shard 0, one file each; shards follow each other in the order of the documents

A shard holds at most a few ten million tokens, and whole documents. Its columns are raw arrays without a header, all
numbers little-endian; D is its number of documents, T of tokens:

    NNNNN.tokens         uint16 or uint32 [T] (`token_dtype` of the index: the smaller one that the vocabulary fits)
    NNNNN.starts         uint64 [D + 1]; document i is tokens[starts[i] : starts[i + 1]]; the last one is T
    NNNNN.ids            the documents' ids one after the other, UTF-8 (half a surrogate pair as if it were a character)
    NNNNN.id_starts      uint64 [D + 1]; the id of document i is bytes [id_starts[i], id_starts[i + 1]) of ids
    NNNNN.trained        ceil(T / 8) bytes, bit t % 8 (1 is the lowest) of byte t // 8: whether token t is trained; not
                         there: all are
    NNNNN.answer_starts  uint64 [D + 1]; the answers of document i are answers[answer_starts[i] : answer_starts[i + 1]]
    NNNNN.answers        uint64: the rows of its document at which each answer of a shared question begins; neither
                         file is there where no document of the shard is one

The index is one JSON object:

    format, version      "hsap prepared documents", 2
    documents, tokens    in all shards
    token_dtype          "uint16" or "uint32"
    recipe               how documents became tokens: tokenizer (file, sha256, vocab_size, before, after: the ids put
                         around every document; bos, eos: the pieces that templates get); and, if any document is a
                         chat, chat_template (name, sha256) and loss, which are null otherwise
    settings, source     what `prepare` was told, and the size, the times and the number of the files that it read: the
                         same command goes on with what is there, another one is refused
    left_out             counts of documents left out by reason; notes: of those trained only in part, likewise; and
                         examples: [place, reason], ...
    shards               one object each: documents, tokens, trained (how many tokens are), read (documents that the
                         source gave for it, with those left out), chats, and columns: bytes and sha256 of each file
    sha256               of all of the above as JSON, keys sorted, no spaces, only ASCII

What is checked when. Opening compares the index with its own checksum, every field with what it can be, and the size of
every file with the index; it reads starts and answers and checks that they are in order. It doesn't read tokens: of a
terabyte that would take an hour at each start of each rank. A token's id is compared with the vocabulary when it is
used, an id's place when it is asked for, and a file's size once more when it is mapped, at its first use. (What shrinks
a mapped file ends the process by SIGBUS, as it ends whoever maps files: replace them whole, don't write into them.) All
checksums are compared by `check` (`hsap data FOLDER --check`), which `prepare` ends with. Files are named by number, so
that no index can lead out of its folder.

While it is written the folder has `unfinished.json` instead of the index (what is being prepared from what), and
NNNNN.json for each shard that is whole and on the disk. After a crash, whatever its moment, the same command goes on
behind these.
"""

from hsap.data.prepared.agreement import check_agreement
from hsap.data.prepared.cache import cached, find_cached
from hsap.data.prepared.checking import check
from hsap.data.prepared.index import INDEX, Index, is_prepared, read_index
from hsap.data.prepared.making import prepare, read_whole
from hsap.data.prepared.progress import Progress
from hsap.data.prepared.reader import open_store

__all__ = [
    "INDEX",
    "Index",
    "Progress",
    "cached",
    "check",
    "check_agreement",
    "find_cached",
    "is_prepared",
    "open_store",
    "prepare",
    "read_index",
    "read_whole",
]
