package limiter

import (
	"math"

	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
)

// usual holds the usual cost of a caller's requests, as moving averages. The
// cost with one model says nothing about another one, so each model has
// separate averages. For a model without any, the averages of all models count.
type usual struct {
	averages
	// estimated and reported are the average tokens that requests were charged
	// with and that backends counted. They show how good the estimates are.
	estimated, reported float64
	requests            int
	// byModel are the averages and outputs by a hash of the model. The key 0 is
	// for all models beyond maxModels.
	byModel map[uint64]*modelUse
}

// averages are moving averages of the cost of requests.
type averages struct {
	// length is the average of Estimate.Prompt, and prompt of the tokens that
	// backends counted. The ratio of the two corrects estimates.
	length, prompt float64
	// output is the average output of requests that can have one.
	output float64
	// promptCount and outputCount are the numbers of requests in the averages,
	// up to memory.
	promptCount, outputCount int
}

// modelUse is the use of a model.
type modelUse struct {
	averages
	outputs
}

var noAverages = averages{length: 256, prompt: 256, output: 128}

var newUsual = usual{averages: noAverages}

// memory is the number of requests that a moving average remembers.
const memory = 16

// leastRatio and mostRatio bound the ratio of tokens to a prompt's length.
const (
	leastRatio = 1.0 / 8
	mostRatio  = 4.0
)

func (a *averages) ratio() float64 { return min(max(a.prompt/a.length, leastRatio), mostRatio) }

// estimate returns the likely cost of a request: the prompt's length times the
// ratio, and twice the average output, or less if the request allows less. use
// is the use of the request's model, or nil if there was none.
func (u *usual) estimate(e ratelimit.Estimate, use *modelUse) (prompt, output int64) {
	if e.Prompt <= 0 {
		return 0, 0
	}
	prompts, outputs := &u.averages, &u.averages
	if use != nil && use.promptCount > 0 {
		prompts = &use.averages
	}
	if use != nil && use.outputCount > 0 {
		outputs = &use.averages
	}
	prompt = int64(math.Ceil(float64(limited(e.Prompt)) * prompts.ratio()))
	twice := max(1, int64(math.Ceil(2*outputs.output)))
	if e.Output < 0 {
		return prompt, twice
	}
	return prompt, min(e.Output, twice)
}

// mostLearned is the largest number of tokens that averages learn from, because
// no model reads or writes more at once. Without this bound, one wrong report
// would make the caller's estimates too high for hundreds of requests.
const mostLearned = 1 << 20

// learn updates the averages with the cost of a request. keptOut is
// Limiter.keptOut.
func (u *usual) learn(now int64, r *Reservation, cost ratelimit.Cost, keptOut uint64) {
	cost.Prompt, cost.Output = min(cost.Prompt, mostLearned), min(limited(cost.Output), mostLearned)
	use := u.of(cost.Model, now)
	for _, a := range []*averages{&u.averages, &use.averages} {
		if r.length > 0 && cost.Prompt > 0 {
			a.learnPrompt(limited(r.length), limited(cost.Prompt))
		}
		if r.replies > 0 {
			a.learnOutput(limited(cost.Output))
		}
	}
	if r.replies > 0 {
		if use.atLeast(cost.Output, r.replies); keptOut >= r.number {
			use.vouch(cost.Output)
		}
	}
	if estimated, reported := r.prompt+r.output, limited(cost.Prompt)+limited(cost.Output); estimated > 0 &&
		reported > 0 {
		part := weight(&u.requests)
		u.estimated += part * (float64(estimated) - u.estimated)
		u.reported += part * (float64(reported) - u.reported)
	}
}

func (a *averages) learnPrompt(length, tokens int64) {
	part := weight(&a.promptCount)
	a.length += part * (float64(length) - a.length)
	a.prompt += part * (float64(tokens) - a.prompt)
}

func (a *averages) learnOutput(tokens int64) {
	a.output += weight(&a.outputCount) * (float64(tokens) - a.output)
}

// weight returns the weight of the next sample. The first samples have more.
func weight(samples *int) float64 {
	*samples = min(*samples+1, memory)
	return 1 / float64(*samples+1)
}

// limited returns the number of tokens, limited to the range that counters can
// add.
func limited(tokens int64) int64 { return min(max(0, tokens), ratelimit.MaxAmount) }
