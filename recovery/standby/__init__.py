"""Groups that are formed before they are needed."""
