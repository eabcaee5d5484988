"""Export what was trained: adapter, merged 16-bit weights, GGUF, Ollama and vLLM folders, each proven by loading it back."""
