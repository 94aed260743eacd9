"""An HTTP server for one bundle, with the interface of OpenAI's chat and text completions."""
