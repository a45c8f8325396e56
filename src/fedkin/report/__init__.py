"""Pictures and pages about results, made by hand: no plotting library is needed."""
