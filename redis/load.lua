-- Returns of each hash in KEYS the fields that have not ended: field, time that is
-- left in milliseconds (0: forever), version and message of each. ARGV: how many
-- milliseconds are left, how many bytes a field has and how many fields are
-- returned of a hash, all at most. What is not like that was not written by put.lua,
-- and is left out. The time of the server follows, in microseconds.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local longest, largest, most = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local groups = {}
for g, key in ipairs(KEYS) do
	local all, alive = redis.pcall('HGETALL', key), {} -- nothing if it is no hash
	for i = 1, #all, 2 do
		if #alive >= 4 * most then
			break
		end
		local e, n, from = string.match(all[i + 1], '^(%d+) %d (%d+) ()')
		local ends = tonumber(e or 1)
		if #all[i + 1] <= largest and (ends == 0 or ends > now and ends <= now + longest) then
			alive[#alive + 1] = all[i]
			alive[#alive + 1] = string.format('%.0f', ends == 0 and 0 or ends - now)
			alive[#alive + 1] = string.sub(all[i + 1], from, from + n - 1)
			alive[#alive + 1] = string.sub(all[i + 1], from + n)
		end
	end
	groups[g] = alive
end
groups[#groups + 1] = time[1] .. string.format('%06d', time[2])
return groups
