"""What torch and user code hold for as long as the job lives: process groups and a device mesh."""
