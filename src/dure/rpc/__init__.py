"""Remote procedure calls between the processes of a job."""
