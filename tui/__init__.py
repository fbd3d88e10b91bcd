"""dflash-chat, the terminal app; reached by name only."""
