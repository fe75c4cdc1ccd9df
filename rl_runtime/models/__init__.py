"""Models and their tokenizers: a small Llama that needs torch alone, and whatever transformers loads from a folder."""
