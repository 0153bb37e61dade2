"""What are the tensors that users hold, and what do torch's ops do on them?"""
