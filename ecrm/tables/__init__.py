"""Tables of a model whose rows a session keeps: the collections, and the rows of a batch."""
