package callers

// mistakes returns warnings about options that have no effect.
func (c Caller) mistakes() (warnings []string) {
	if c.withoutOptions() && !c.Deny {
		warnings = append(warnings, "caller '"+c.Name+"' has no options, so nothing limits it")
	}
	limits, _ := c.limits() // they were checked
	for _, shorter := range limits {
		for _, longer := range limits {
			if shorter.Kind == longer.Kind && shorter.Unit < longer.Unit && longer.Amount < shorter.Amount && longer.Then == "" {
				warnings = append(warnings, "caller '"+c.Name+"': '"+shorter.Kind.String()+" "+shorter.String()+"' has no effect, because "+longer.String()+" is less")
			}
		}
	}
	return warnings
}
