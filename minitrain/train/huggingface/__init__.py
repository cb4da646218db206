"""Models in Hugging Face's layout: names and shapes of weights, config.json, folders."""
