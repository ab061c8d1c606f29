// Package usage turns what an agent counts (UsageResponse, the answer of the API's Usage) into rates. It is pure:
// `skein top` prints what it gives, and tests and benchmarks compare it with bounds.
//
//	before, err := client.Usage(ctx, &skeinv1.UsageRequest{})
//	…
//	after, err := client.Usage(ctx, &skeinv1.UsageRequest{})
//	rates, err := usage.Between(before, after)
//
// In a lab, Lab.Usage asks many agents at once and lab.Rates compares two of its answers.
package usage
