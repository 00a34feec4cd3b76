"""What people run: the commands of `stepwell`, and the analysis behind them and the dashboard."""
