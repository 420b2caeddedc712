"""Parts of minivlmrl for other libraries, which are imported only on request."""
