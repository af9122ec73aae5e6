package meter

import "math"

// usual is what a caller's requests usually cost, as moving averages.
type usual struct {
	// length and prompt are Estimate.Prompt and the tokens that backends counted: the ratio of these
	// corrects estimates.
	length, prompt float64
	// output is that of requests that may have one.
	output           float64
	prompts, outputs int
	// estimated and reported are the tokens that requests were charged with, and that backends counted:
	// they show how good the estimates are.
	estimated, reported float64
	requests            int
	// byModel are the outputs by model. 0 is all other models.
	byModel map[uint64]*outputs
}

var newUsual = usual{length: 256, prompt: 256, output: 128}

// memory is how many requests a moving average remembers.
const memory = 16

// The ratio's bounds: an estimate is never further from the prompt's length.
const (
	leastRatio = 1.0 / 8
	mostRatio  = 4.0
)

func (u *usual) ratio() float64 { return min(max(u.prompt/u.length, leastRatio), mostRatio) }

func (u *usual) estimate(e Estimate) (prompt, output int64) {
	if e.Prompt <= 0 {
		return 0, 0
	}
	prompt = int64(math.Ceil(float64(limited(e.Prompt)) * u.ratio()))
	twice := max(1, int64(math.Ceil(2*u.output)))
	if e.Output < 0 {
		return prompt, twice
	}
	return prompt, min(e.Output, twice)
}

// mostLearned is the largest number of tokens that averages learn from: no model reads or writes more at once.
// After one wrong report, the caller's estimates would otherwise be too high for hundreds of requests.
const mostLearned = 1 << 20

// learn learns from the cost of a request. held is the number of the latest request when requests in flight last kept out another one.
func (u *usual) learn(now int64, r *Reservation, cost Cost, held uint64) {
	cost.Prompt, cost.Output = min(cost.Prompt, mostLearned), min(limited(cost.Output), mostLearned)
	if r.length > 0 && cost.Prompt > 0 {
		part := weight(&u.prompts)
		u.length += part * (float64(limited(r.length)) - u.length)
		u.prompt += part * (float64(limited(cost.Prompt)) - u.prompt)
	}
	if r.outputs {
		u.output += weight(&u.outputs) * (float64(limited(cost.Output)) - u.output)
		o := u.outputOf(cost.Model, now)
		if o.atLeast(cost.Output, r.replies); held >= r.number {
			o.vouch(cost.Output)
		}
	}
	if estimated, reported := r.prompt+r.output, limited(cost.Prompt)+limited(cost.Output); estimated > 0 && reported > 0 {
		part := weight(&u.requests)
		u.estimated += part * (float64(estimated) - u.estimated)
		u.reported += part * (float64(reported) - u.reported)
	}
}

// weight is how much the next sample counts: the first ones count more.
func weight(samples *int) float64 {
	*samples = min(*samples+1, memory)
	return 1 / float64(*samples+1)
}

// limited returns a number of tokens that a counter can add.
func limited(tokens int64) int64 { return min(max(0, tokens), MaxAmount) }
