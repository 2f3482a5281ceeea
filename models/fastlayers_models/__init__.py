"""Model families written from `fastlayers` layers: DeepSeek first, then Qwen, GPT-OSS and Llama."""
