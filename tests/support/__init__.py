"""What several test modules use: small trainings, servers, snapshots, and the programs that tests run and kill."""
