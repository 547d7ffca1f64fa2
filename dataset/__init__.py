"""What is measured: the nouns, the harness, readers of traces and tables, the store, graphs for learning."""
