"""Linear projections of one input, what reads their results, and the products behind them."""
