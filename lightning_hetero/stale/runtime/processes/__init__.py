"""The server's process: started, watched, ended; process groups without the dead (layer T)."""
