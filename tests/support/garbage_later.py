"""The first import of the server of the ranks: nothing that it imports is garbage. Each rank looks for some again."""

import gc

gc.disable()
