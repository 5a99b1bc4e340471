"""What happened in a stored run, in the words of its log and of the playbook."""
