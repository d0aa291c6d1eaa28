"""KEDA's external scaler: says whether workers are needed, and how many. `v1` has the stubs of protos/keda."""
