"""What every floor uses: progress, errors, output files, text for messages."""
