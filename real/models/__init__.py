"""Small models for real runs: our own configurations, one that ships in a package, and any Hugging Face folder.

`prepare.prepare_model` is the way in; nothing here is imported before it is needed, because torch is heavy."""
