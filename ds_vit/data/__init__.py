"""Data: sources, sample order, augmentation, mixing, micro-batches, and the model's inputs.

    sources/       where images come from
    sampler.py     which sample is at which row of which step, and on which rank
    settings.py    the model's input: size, normalisation, evaluation's crop; several crops of an image
    decode.py      an image file's bytes to pixels, in a worker or on the device
    text.py        a caption to token ids
    augment/       the transforms, erasing and mixing; each random step is a keyed draw and its application
    batches.py     what a micro-batch holds, and the shared memory of its images
    loader.py      micro-batches read in worker processes
    device.py      the model's inputs from them, on the device

Nothing here draws from a process's random generator: a micro-batch is a pure function of (source, settings, seed,
step, share), whatever the number of ranks and workers.
"""
