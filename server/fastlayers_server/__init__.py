"""The command line and the OpenAI-compatible server, on top of `fastlayers_models`."""
