"""What an audit log is, for the server that writes one and for the command that checks one."""
