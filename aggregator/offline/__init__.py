"""What a run's log can be asked, afterwards or while it runs: the same numbers as live, and all behind them."""
