"""Who may do what: principals and their roles, the methods they may call, the adapters they may see."""
