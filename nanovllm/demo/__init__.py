"""A retrieval model that needs no download, its byte tokenizer, and haystacks to search with it."""
