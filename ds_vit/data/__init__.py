"""Data: sources, sample order, fields, micro-batches, and the tensors of a batch.

    sources/       where samples come from: a dict of entries each
    field.py       a sample, the rows of a micro-batch, and a field: read, collate, to_device
    fields.py      the fields of images, classes and captions
    sampler.py     which sample is at which row of which step, and on which rank
    settings.py    the model's input: size, normalisation, evaluation's crop; several crops of an image
    decode.py      an image file's bytes to pixels, in a worker or on the device
    text.py        a caption to token ids
    augment/       the transforms, erasing and mixing; each random step is a keyed draw and its application
    rows.py        the rows of a micro-batch by its number, and how they are mixed
    reader.py      micro-batches read: replacement of damaged samples
    loader.py      the same in worker processes
    slots.py       the shared memory through which they send tensors

Nothing here draws from a process's random generator: a micro-batch is a pure function of (source, fields, seed, step,
share), whatever the number of ranks and workers.
"""
