"""A model that needs no download and really retrieves, its byte tokenizer, and haystacks to search with it."""
