"""How a next token is filtered, and which texts end a completion."""
