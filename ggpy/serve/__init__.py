"""The HTTP server: OpenAI's, Anthropic's and llama.cpp's endpoints over one engine."""
