// Package alerts holds deploy/prometheus and deploy/grafana to what agents really export: its test raises a mesh and a
// Prometheus in it, lets that evaluate every alert and every query of the dashboard, and breaks what alerts are about.
package alerts
