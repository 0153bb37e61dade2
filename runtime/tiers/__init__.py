"""What lies in another memory than the device's, and how does it get there and back?"""
