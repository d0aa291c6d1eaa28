"""The control plane: owns every decision. Registry, host cache, scheduler, fleet of workers, gRPC API. No torch."""
