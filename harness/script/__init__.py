"""Any training script under test: started as it is, watched and hit from outside."""
