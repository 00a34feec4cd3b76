"""Parts of `stepwell launcher`: permissions, processes, records of launches, and the main loop."""
