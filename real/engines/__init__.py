"""SGLang engines: what one server is started with, its process, and the client that speaks its native protocol."""
