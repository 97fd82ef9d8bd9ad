"""The reference ML service: the gRPC contract, one online model per tenant, and a server."""
