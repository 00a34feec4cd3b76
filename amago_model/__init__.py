"""amago_model"""
