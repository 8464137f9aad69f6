"""What a run's log can be asked, afterwards or while it runs: the numbers of the run, and all behind them."""
