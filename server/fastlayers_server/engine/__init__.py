"""The engine: requests in, tokens out. Start reading at :mod:`fastlayers_server.engine.protocol`."""
