local kept = redis.call('GET', KEYS[1])
if kept and (string.sub(kept, 1, 1) == '+' or string.sub(ARGV[1], 1, 1) ~= '+') then
	return redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
