"""What every dialect shares: admission under TGI's rules, how requests are run, one turn of a conversation."""
