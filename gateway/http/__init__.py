"""What every protocol of the gateway needs: settings, keys, bodies, errors, health, the connection to Motet."""
