"""What coordinator and agents share: messages, the connection they travel on, clocks, files."""
