package linkhold

// Abandon ends a hold as the end of the process does: the table stays.
func (h *Hold) Abandon() error { return h.queue.Close() }
