// Package forced is the step of discovery that an operator decides: the endpoint in the configuration. A DNS name is
// looked up again every minute, so that a changed address is followed. What the name last meant is kept while it cannot
// be looked up, for keepFailed when the name service does not answer and for keepGone when it says that the name is
// gone; meanwhile the step tells of the problem.
package forced
